"""The reconstruction baseline of the audit: a variational autoencoder on the same images (GCL, appendix C.1).

N images, C channels (all of them, injected ones too), s pixels, F width of the representation that probes read,
L width of the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from kontrast import networks

LATENT = 64


class VariationalAutoencoder(nn.Module):
    """ConvN to F, a Gaussian latent, and ConvN mirrored back to every channel.

    loss = -log p(x | h) + beta KL(q(h | x) || N(0, 1))      Bernoulli likelihood, nats per image
    """

    def __init__(self, channels: int = 3, size: int = 32, latent: int = LATENT, beta: float = 1.0):
        super().__init__()
        self.encoder = networks.encoder("convn", channels=channels, size=size)
        self.posterior = nn.Linear(self.encoder.width, 2 * latent)
        # A posterior that begins narrow lets the decoder learn from the first step on; at unit variance it sees noise.
        nn.init.constant_(self.posterior.bias[latent:], -4.0)
        self.decoder = MirroredConvN(latent, channels, size, self.encoder.width)
        self.beta = beta

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N,C,s,s], mean and log-variance [N,L] of images in [0,1]."""
        mean, log_variance = self.posterior(self.encoder(x)).chunk(2, dim=1)
        h = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(h), mean, log_variance

    def loss(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits, mean, log_variance = self(x)
        reconstruction = binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return reconstruction + self.beta * divergence


class MirroredConvN(nn.Module):
    """ConvN backwards: a dense layer, then three transposed 3x3 convolutions of stride 2 up to the image's size."""

    def __init__(self, latent: int, channels: int, size: int, width: int):
        super().__init__()
        sides = [size]
        for _ in range(3):
            sides.append((sides[-1] - 3) // 2 + 1)
        self.side = sides.pop()
        self.level = nn.Linear(latent, channels)
        wide = 64 * self.side**2
        self.dense = nn.Sequential(
            nn.Linear(latent, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(True),
            nn.Linear(width, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(True),
        )  # fmt: skip
        layers: list[nn.Module] = []
        inputs, below = 64, self.side
        for side, outputs in zip(reversed(sides), (64, 32, channels)):
            # A valid stride-2 convolution drops the last row of an even side; the mirror puts it back.
            last = outputs == channels and side == size
            grow = nn.ConvTranspose2d(inputs, outputs, 3, 2, output_padding=side - (2 * below + 1), bias=last)
            layers += [grow] if last else [grow, nn.BatchNorm2d(outputs), nn.ReLU(True)]
            inputs, below = outputs, side
        self.layers = nn.Sequential(*layers)

    def forward(self, h: Tensor) -> Tensor:
        detail = self.layers(self.dense(h).unflatten(1, (64, self.side, self.side)))
        return detail + self.level(h)[:, :, None, None]
