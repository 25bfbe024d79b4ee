"""Rules about batches: sizes that TRL would refuse later, in terser words, or accept and then break."""

from typing import TYPE_CHECKING, cast

from .config_rules import refusal


if TYPE_CHECKING:
    from .config import DROConfig


def resolve_batch_geometry(cfg: "DROConfig", world_size: int) -> None:
    """Check the sizes of batches on `world_size` processes.

    Raises:
        ValueError: they do not fit together.
    """
    micro_step = cfg.per_device_train_batch_size * world_size
    if cfg.generation_batch_size is not None:
        _check_generation_batch(cfg, cfg.generation_batch_size, world_size)
        if cfg.steps_per_generation is not None:  # TRL fills in both, then refuses a config that sets both
            cfg.generation_batch_size = None
    accumulation = cfg.gradient_accumulation_steps
    steps = cfg.steps_per_generation or (cfg.generation_batch_size or micro_step * accumulation) // micro_step
    if steps % accumulation and accumulation % steps:
        allowed = (
            f"one of steps_per_generation and gradient_accumulation_steps={accumulation} must divide the other, "
            "so that an optimizer step sees whole generation batches or whole parts of one"
        )
        raise refusal("steps_per_generation", steps, allowed, f"steps_per_generation={accumulation}")
    _check_groups(cfg, micro_step * steps, steps, world_size)
    if cfg.evaluates:
        cfg.check_evaluation_batch(world_size)


def _check_generation_batch(cfg: "DROConfig", size: int, world_size: int) -> None:
    micro_step = cfg.per_device_train_batch_size * world_size
    if size % micro_step:
        allowed = (
            f"it must be a multiple of per_device_train_batch_size * processes = "
            f"{cfg.per_device_train_batch_size} * {world_size} = {micro_step}"
        )
        nearest = max(size // micro_step, 1) * micro_step
        raise refusal("generation_batch_size", size, allowed, f"generation_batch_size={nearest}")
    if cfg.steps_per_generation is not None and size != micro_step * cfg.steps_per_generation:
        allowed = (
            f"steps_per_generation={cfg.steps_per_generation} makes it "
            f"{micro_step * cfg.steps_per_generation} (= {micro_step} * {cfg.steps_per_generation}); "
            "give one of the two"
        )
        raise refusal("generation_batch_size", size, allowed, "generation_batch_size=None")


def _check_groups(cfg: "DROConfig", rows: int, steps: int, world_size: int) -> None:
    num_generations = cast(int, cfg.num_generations)
    if rows % num_generations:
        allowed = (
            f"it must divide the generation batch of {rows} rows (per_device_train_batch_size "
            f"{cfg.per_device_train_batch_size} * {world_size} processes * steps_per_generation {steps})"
        )
        fits = [size for size in range(2, rows + 1) if rows % size == 0]
        instead = (
            f"num_generations={min(fits, key=lambda size: abs(size - num_generations))}"
            if fits
            else f"per_device_train_batch_size={num_generations}"
        )
        raise refusal("num_generations", num_generations, allowed, instead)
