"""Use an objective in your own training loop: python examples/own_loop.py"""

import torch

import kontrast

torch.manual_seed(0)
encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
objective = kontrast.objective("dcl", temperature=0.1)
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
images = torch.rand(512, 1, 8, 8)

for _ in range(50):
    batch = images[torch.randint(len(images), (128,))]
    views = torch.stack([batch + 0.1 * torch.randn_like(batch) for _ in range(2)])  # [V,B,1,8,8]: your augmentation
    z = encoder(views.flatten(0, 1)).unflatten(0, (2, 128))  # [V,B,D]
    terms = objective.terms(z)
    optimizer.zero_grad()
    terms.total.backward()
    optimizer.step()

print(f"attraction {terms.attraction:.3f}  repulsion {terms.repulsion:.3f}")
