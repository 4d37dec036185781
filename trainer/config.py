"""The configuration: what can be set, its defaults, the presets.

Where values come from is in `trainer.sources`. Every duration key carries its unit.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "PRESETS",
    "Config",
    "DataConfig",
    "DistConfig",
    "FaultsConfig",
    "LoaderConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
]


class Section(BaseModel):
    """One section: immutable, unknown keys refused.

    The word ``none`` stands for "not set", because neither TOML nor an environment variable nor
    a command line can say it otherwise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            key: None if isinstance(value, str) and value.lower() == "none" else value
            for key, value in values.items()
        }


class TrainConfig(Section):
    """How long, on what, and how it reports."""

    epochs: int = Field(
        default=5, ge=1, description="passes over the training set, unless steps is set"
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps; when set it decides alone, over as many epochs",
    )
    accumulate: int = Field(
        default=1, ge=1, description="micro-batches that make one optimizer step"
    )
    threads: int | Literal["auto"] = Field(
        default="auto", description="torch threads of each rank; auto: cores / ranks on this node"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda if there is one"
    )
    seed: int = Field(default=0, ge=0, description="of weights, order and augmentation")
    log_interval_steps: int = Field(
        default=10, ge=1, description="optimizer steps between two lines"
    )
    eval_interval_epochs: int = Field(default=1, ge=0, description="0: never evaluate")
    watch: bool = Field(default=True, description="publish telemetry for gpuwatch")

    @model_validator(mode="after")
    def _threads_positive(self) -> "TrainConfig":
        if self.threads != "auto" and self.threads < 1:
            raise ValueError("train.threads must be auto or at least 1")
        return self


class ModelConfig(Section):
    """Which model is trained."""

    name: Literal["cnn"] = Field(
        default="cnn", description="cnn: a small residual-free CNN with BatchNorm"
    )
    width: int = Field(default=32, ge=4, le=1024, description="channels of the first stage")


class DataConfig(Section):
    """Which images are read and how they are cut."""

    path: Path | None = Field(
        default=None,
        description="folder with one subfolder per class (or train/ and val/ holding those); "
        "none: a seeded JPEG set, made at first use in the cache folder",
    )
    image_px: int = Field(
        default=64, ge=8, le=2048, description="side of the square the model sees"
    )
    crop_scale_min: float = Field(
        default=0.35, gt=0, le=1, description="smallest share of the area a random crop keeps"
    )
    flip_probability: float = Field(default=0.5, ge=0, le=1, description="of a horizontal flip")
    eval_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share of the images held out (unless there is a val/ folder)",
    )
    synthetic_images: int = Field(
        default=512, ge=2, le=1_000_000, description="size of the made set"
    )
    synthetic_classes: int = Field(default=8, ge=2, le=1000, description="classes of the made set")
    synthetic_px: int = Field(default=384, ge=16, le=4096, description="side of the made JPEGs")
    synthetic_seed: int = Field(default=0, ge=0, description="of the made set")


class LoaderConfig(Section):
    """How batches are fetched. ``auto`` values adapt to each other and to the machine."""

    batch_size: int = Field(default=32, ge=1, description="images of one micro-batch on one rank")
    num_workers: int | Literal["auto"] = Field(
        default="auto",
        description="loader processes of each rank; auto: cores / ranks here, 1 to 8",
    )
    prefetch_factor: int | Literal["auto"] = Field(
        default="auto", description="batches each worker keeps ready; auto: 2"
    )
    persistent_workers: bool | Literal["auto"] = Field(
        default="auto", description="keep workers between epochs; auto: wherever there are any"
    )
    pin_memory: bool | Literal["auto"] = Field(
        default="auto", description="page-locked batches; auto: with CUDA only"
    )
    drop_last: bool = Field(default=True, description="leave an incomplete last micro-batch out")
    in_order: bool = Field(default=True, description="deliver batches in sampler order")
    timeout_s: float = Field(
        default=0.0, ge=0, description="give up on a batch after that; 0: never"
    )
    multiprocessing_context: Literal["auto", "fork", "forkserver", "spawn"] = Field(
        default="auto", description="how workers are started; auto: Python's default"
    )

    @model_validator(mode="after")
    def _possible(self) -> "LoaderConfig":
        if self.num_workers != "auto" and self.num_workers < 0:
            raise ValueError("loader.num_workers must be auto or at least 0")
        if self.prefetch_factor != "auto" and self.prefetch_factor < 1:
            raise ValueError("loader.prefetch_factor must be auto or at least 1")
        if self.num_workers == 0:
            without = "loader.num_workers=0 loads in the training process, so"
            if self.prefetch_factor != "auto":
                raise ValueError(f"{without} loader.prefetch_factor has to be left out")
            if self.persistent_workers is True:
                raise ValueError(f"{without} loader.persistent_workers=true cannot be kept")
            if self.multiprocessing_context != "auto":
                raise ValueError(f"{without} loader.multiprocessing_context has to be left out")
            if self.timeout_s > 0:
                raise ValueError(f"{without} loader.timeout_s cannot interrupt it")
        return self


class OptimConfig(Section):
    """Optimizer and learning rate."""

    name: Literal["sgd", "adamw"] = Field(default="sgd", description="sgd has Nesterov momentum")
    lr: float | Literal["auto"] = Field(
        default="auto", description="peak learning rate; auto: 0.05 for sgd, 0.001 for adamw"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(
        default=5e-4, ge=0, description="on weights, not on norms and biases"
    )
    schedule: Literal["cosine", "constant"] = Field(
        default="cosine", description="after the warm-up"
    )
    warmup_steps: int = Field(default=10, ge=0, description="optimizer steps up to the peak")
    lr_min_ratio: float = Field(
        default=0.0, ge=0, le=1, description="where cosine ends, share of lr"
    )

    @model_validator(mode="after")
    def _lr_positive(self) -> "OptimConfig":
        if self.lr != "auto" and self.lr <= 0:
            raise ValueError("optim.lr must be auto or above 0")
        return self

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up, ``auto`` settled."""
        if self.lr != "auto":
            return self.lr
        return 0.05 if self.name == "sgd" else 1e-3


class DistConfig(Section):
    """Process group and DistributedDataParallel; used under torchrun only."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="auto: nccl with CUDA"
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="a collective that takes longer is an error"
    )
    bucket_cap_mb: float = Field(default=25.0, gt=0, description="gradients reduced in one go")
    broadcast_buffers: bool = Field(
        default=True, description="rank 0's BatchNorm statistics to all"
    )
    gradient_as_bucket_view: bool = Field(
        default=True, description="saves one copy of the gradients"
    )
    find_unused_parameters: bool = Field(
        default=False, description="needed only if outputs skip weights"
    )


class FaultsConfig(Section):
    """Faults injected on request, for demos and tests; all off by default."""

    rank: int | None = Field(default=None, ge=0, description="which rank; none: all")
    item_latency_ms: float = Field(
        default=0.0, ge=0, description="each item waits that much longer: a simulated remote read"
    )
    data_ms: float = Field(
        default=0.0, ge=0, description="each fetch blocks the training thread longer"
    )
    forward_ms: float = Field(default=0.0, ge=0, description="each forward sleeps")
    backward_ms: float = Field(default=0.0, ge=0, description="each backward sleeps")
    inject: str = Field(
        default="",
        description="faults by name, between commas: NAME[:strength][@rank]; also --fault",
    )


class Config(Section):
    """The whole configuration. ``Config()`` is the defaults, without any source."""

    preset: Literal["cnn"] = Field(
        default="cnn", description="a set of values under all other sources"
    )
    train: TrainConfig = TrainConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    loader: LoaderConfig = LoaderConfig()
    optim: OptimConfig = OptimConfig()
    dist: DistConfig = DistConfig()
    faults: FaultsConfig = FaultsConfig()


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # A small CNN that learns the made set in a minute on two cores.
    "cnn": {
        "model": {"name": "cnn", "width": 32},
        "data": {"image_px": 64},
        "loader": {"batch_size": 32},
        "optim": {"name": "sgd", "weight_decay": 5e-4, "warmup_steps": 10},
    },
}
