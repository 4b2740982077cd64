"""What a FusedAccumulator was told to do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from fastaccum import arguments

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass
class Options:
    """The options of one wrapper, checked; :class:`fastaccum.FusedAccumulator` says what each means."""

    accumulation_steps: int
    max_norm: float | None
    norm_type: float
    max_value: float | None
    reduction: str
    take: str
    nonfinite: str
    accumulate_dtype: torch.dtype | None
    nonfinite_micro_batch: str
    master_weights: bool
    backend: str

    @classmethod
    def checked(
        cls,
        *,
        accumulation_steps: Any,
        max_norm: Any,
        norm_type: Any,
        max_value: Any,
        reduction: Any,
        take: Any,
        nonfinite: Any,
        accumulate_dtype: Any,
        nonfinite_micro_batch: Any,
        master_weights: Any,
        backend: str,
    ) -> Self:
        """From a user's arguments.

        Raises:
            TypeError, ValueError: one is wrong, or two exclude each other.
        """
        options = cls(
            accumulation_steps=arguments.accumulation_steps(accumulation_steps),
            max_norm=arguments.max_norm(max_norm),
            norm_type=arguments.norm_type(norm_type),
            max_value=arguments.positive(max_value, "max_value", "pass None not to clamp"),
            reduction=arguments.choice(reduction, "reduction", arguments.REDUCTIONS),
            take=arguments.choice(take, "take", arguments.TAKES),
            nonfinite=arguments.choice(nonfinite, "nonfinite", arguments.NONFINITE),
            accumulate_dtype=arguments.accumulate_dtype(accumulate_dtype),
            nonfinite_micro_batch=arguments.choice(
                nonfinite_micro_batch, "nonfinite_micro_batch", arguments.NONFINITE_MICRO_BATCH
            ),
            master_weights=arguments.boolean(master_weights, "master_weights"),
            backend=backend,  # dispatch.choose() checks it, for the device
        )
        if options.take == "backward" and options.drops:
            raise ValueError(
                "nonfinite_micro_batch='drop' needs a whole micro-batch to look at, and take='backward' adds "
                "its gradients while backward runs: use take='step'"
            )
        if options.max_norm is not None and options.max_value is not None:
            raise ValueError(
                f"max_norm={max_norm} and max_value={max_value} exclude each other: clip by norm or by value"
            )
        return options

    @property
    def drops(self) -> bool:
        """Micro-batches that are not finite are left out."""
        return self.nonfinite_micro_batch == "drop"

    def __str__(self) -> str:
        """As arguments."""
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
