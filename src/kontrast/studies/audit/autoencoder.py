"""The audit's reconstruction baseline: a variational autoencoder on the same views (GCL, appendix C.1).

N images, C channels (including added ones), s pixels per side, L width of the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from kontrast.config.recipe import Recipe
from kontrast.training.build import build_views
from kontrast.training.learner import build_student

LATENT = 64
INITIAL_LOG_VARIANCE = -4.0  # with unit variance the decoder would see little but noise in its first epochs


class VariationalAutoencoder(nn.Module):
    """The recipe's encoder, a Gaussian latent, and a decoder that mirrors ConvN and predicts every channel.

    loss = -log p(x | h) + beta KL(q(h | x) || N(0, 1))      Bernoulli likelihood, nats per image

    The likelihood counts each pixel of the picture. A random bit fills a whole channel, but counts once: counted at
    each of the s x s pixels, ten bits would weigh 7,100 nats at 32 pixels, against about 200 that the content of the
    picture can explain. With `each_pixel` it does count at every pixel, which is the likelihood of the whole input.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, recipe: Recipe, channels: int = 3, beta: float = 1.0, each_pixel: bool = False):
        super().__init__()
        self.encoder = build_student(recipe, channels).encoder
        self.posterior = nn.Linear(self.encoder.width, 2 * LATENT)
        nn.init.constant_(self.posterior.bias[LATENT:], INITIAL_LOG_VARIANCE)
        self.decoder = MirroredConvN(LATENT, channels, recipe.views.size)
        self.beta, self.each_pixel = beta, each_pixel
        policy = build_views(recipe, torch.float32).policies[0]
        self.picture_channels = policy.picture_channels(channels)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(policy, name))[: self.picture_channels].expand(self.picture_channels)
            self.register_buffer(name, values[:, None, None].clone(), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N,C,s,s], mean and log-variance [N,L] of views x [N,C,s,s]."""
        mean, log_variance = self.posterior(self.encoder(x)).chunk(2, dim=1)
        h = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(h), mean, log_variance

    def loss(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits, mean, log_variance = self(x)
        pixels = (x[:, : self.picture_channels] * self.std + self.mean).clamp(0, 1)
        target = torch.cat([pixels, x[:, self.picture_channels :]], 1)
        by_channel = binary_cross_entropy_with_logits(logits, target, reduction="none").mean(0)
        picture, single = by_channel[: self.picture_channels].sum(), by_channel[self.picture_channels :]
        single = single.sum() if self.each_pixel else single.mean((1, 2)).sum()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return picture + single + self.beta * divergence


class MirroredConvN(nn.Module):
    """ConvN in reverse: a dense layer and three transposed 3x3 convolutions of stride 2, plus a level per channel."""

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
            # A stride-2 convolution without padding drops the last row of an even side; this restores it.
            grow = nn.ConvTranspose2d(inputs, outputs, 3, 2, output_padding=side - (2 * below + 1))
            nn.init.kaiming_normal_(grow.weight, mode="fan_out")
            layers += [grow, nn.ReLU(True)]
            inputs, below = outputs, side
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, h: Tensor) -> Tensor:
        detail = self.layers(self.dense(h).unflatten(1, (64, self.side, self.side)))
        return detail + self.level(h)[:, :, None, None]
