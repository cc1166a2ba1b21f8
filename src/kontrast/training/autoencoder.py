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
NARROW = -4.0  # log-variance at the start: at unit variance the decoder would see little but noise for its first epochs


class VariationalAutoencoder(nn.Module):
    """ConvN to F, a Gaussian latent, and ConvN mirrored back to every channel.

    loss = -log p(x | h) + beta KL(q(h | x) || N(0, 1))      Bernoulli likelihood, nats per image
    """

    def __init__(self, channels: int = 3, size: int = 32, latent: int = LATENT, beta: float = 1.0):
        super().__init__()
        self.encoder = LevelAndDetail(channels, size)
        self.posterior = nn.Linear(self.encoder.width, 2 * latent)
        nn.init.constant_(self.posterior.bias[latent:], NARROW)
        self.decoder = MirroredConvN(latent, channels, size)
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


class LevelAndDetail(nn.Module):
    """Mean-removed coding: each channel's mean, beside ConvN's view of what is left. [N,C,s,s] -> [N, 128 + C].

    Constant channels (random bits) are levels, and so never reach ConvN: that the autoencoder does not suffer from them
    is this encoder's doing as much as the loss's. On the raw channels ten bits shift every threshold of the first
    layer, and in an audit's few steps the digit is not read from ConvN at all, whatever is reconstructed.
    """

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.detail = networks.encoder("convn", channels=channels, size=size)
        self.width = self.detail.width + channels

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean(dim=(2, 3))
        return torch.cat([self.detail(x - level[:, :, None, None]), level], dim=1)


class MirroredConvN(nn.Module):
    """ConvN backwards: a dense layer, then three transposed 3x3 convolutions of stride 2; levels by a linear layer."""

    def __init__(self, latent: int, channels: int, size: int):
        super().__init__()
        sides = [size]
        for _ in range(3):
            sides.append((sides[-1] - 3) // 2 + 1)
        self.side = sides.pop()
        self.level = nn.Linear(latent, channels)
        self.dense = nn.Sequential(nn.Linear(latent, 64 * self.side**2), nn.ReLU(True))
        layers: list[nn.Module] = []
        inputs, below = 64, self.side
        for side, outputs in zip(reversed(sides), (64, 32, channels)):
            # A valid stride-2 convolution drops the last row of an even side; the mirror puts it back.
            grow = nn.ConvTranspose2d(inputs, outputs, 3, 2, output_padding=side - (2 * below + 1))
            nn.init.kaiming_normal_(grow.weight, mode="fan_out")
            layers += [grow, nn.ReLU(True)]
            inputs, below = outputs, side
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, h: Tensor) -> Tensor:
        detail = self.layers(self.dense(h).unflatten(1, (64, self.side, self.side)))
        return detail + self.level(h)[:, :, None, None]
