#!/usr/bin/env bash
# Train on several nodes of a SLURM cluster: sbatch examples/slurm.sh OUT [DATA] [--recipe NAME] [key=value ...]
#
# OUT, the run folder, and DATA have to be on storage that all nodes share. Five minutes before the time limit, SLURM
# sends SIGUSR1 to this script: the ranks save their step and end, and the job is queued again and resumes the run. After
# SIGTERM (scancel, or preemption, after which SLURM itself queues the job again) they save too, and the script exits
# with 75. A job that resumes a finished run ends at once.
#SBATCH --job-name=kontrast
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

out=${1:?"give the run folder: sbatch examples/slurm.sh OUT [DATA] [key=value ...]"}
shift
[ -e "$out/recipe.toml" ] && set -- --resume "$@"
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${PORT:-$((20000 + SLURM_JOB_ID % 20000))}

srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" --rdzv-id "$SLURM_JOB_ID" \
  -m kontrast pretrain --out "$out" "$@" &
step=$!

received=
trap 'received=TERM; kill -TERM "$step"' TERM
trap 'received=USR1; kill -TERM "$step"' USR1  # kontrast saves and stops on SIGTERM; srun passes it on to torchrun
while kill -0 "$step" 2>/dev/null; do  # a signal ends `wait` early
  wait "$step"
  code=$?
done

if [ "$received" = USR1 ] && [ "$code" != 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
[ -n "$received" ] && [ "$code" != 0 ] && exit 75
exit "$code"
