# kontrast in a container.
#
#   docker build --tag kontrast .                             # for CPUs
#   docker build --build-arg DEVICE=cuda --tag kontrast .     # for NVIDIA GPUs: docker run --gpus all ...
#   docker build --build-arg EXTRAS="[hub,timm]" ...          # with optional extras
#   docker run --rm kontrast                                  # the quick start, without data or network
#   docker run --rm --volume "$PWD:/data" --user "$(id -u):$(id -g)" kontrast kontrast pretrain photos

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG DEVICE=cpu
ARG EXTRAS=""
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
RUN pip install uv
WORKDIR /source
COPY pyproject.toml README.md LICENSE CHANGELOG.md CITATION.cff ./
COPY src ./src
RUN uv build --wheel --out-dir /dist
RUN uv venv --python "$(command -v python)" /opt/kontrast
RUN case "$DEVICE" in \
        cpu) export UV_TORCH_BACKEND=cpu ;; \
        cuda) ;; \
        *) echo "DEVICE is cpu or cuda, not $DEVICE" >&2; exit 2 ;; \
    esac; \
    uv pip install --python /opt/kontrast "$(echo /dist/*.whl)$EXTRAS"

FROM python:${PYTHON}-slim
RUN useradd --create-home kontrast && mkdir -p /data && chown kontrast:kontrast /data
COPY --from=build /opt/kontrast /opt/kontrast
ENV PATH=/opt/kontrast/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /data
USER kontrast
CMD ["kontrast", "pretrain", "--out", "run"]
