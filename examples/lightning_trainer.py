"""Any LightningModule, here Lightning's own for demonstrations: the Trainer gets one callback more."""

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from fastaccum.bridges.lightning import FusedWindows

trainer = Trainer(
    accumulate_grad_batches=4,
    callbacks=[FusedWindows(max_norm=1.0)],
    max_epochs=1,
    limit_val_batches=0,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 20), batch_size=2))
print(f"{trainer.global_step} updates")
