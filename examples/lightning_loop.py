"""Use an objective in a LightningModule: pip install pytorch-lightning, then python examples/lightning_loop.py"""

import pytorch_lightning as lightning
import torch

import kontrast


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)
        self.encoder = torch.nn.Sequential(torch.nn.Flatten(), *layers)
        self.objective = kontrast.objective("cacr", t_plus=1.0, t_minus=2.0)

    def training_step(self, batch, _):
        views = torch.stack([batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(3)])  # [V,B,1,8,8]
        terms = self.objective.terms(self.encoder(views.flatten(0, 1)).unflatten(0, views.shape[:2]))
        self.log_dict(dict(terms))  # on several ranks the objective gathers the whole batch itself
        return terms.total

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    lightning.seed_everything(0)
    images = torch.utils.data.TensorDataset(torch.rand(512, 1, 8, 8))
    loader = torch.utils.data.DataLoader(images, batch_size=128, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Module(), loader)
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
