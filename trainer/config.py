"""The configuration: what can be set, its defaults, the presets.

Where values come from is in `trainer.sources`. Every duration key carries its unit.
"""

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "PRESETS",
    "Compression",
    "Config",
    "DataConfig",
    "DistConfig",
    "FaultsConfig",
    "LoaderConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "PrecisionConfig",
    "TextConfig",
    "TrainConfig",
]


Compression = Literal["fp16_compress_hook", "bf16_compress_hook"]
"""Of gradients on their way: hooks of DDP, by the names that torch gives them."""


class Section(BaseModel):
    """One section: immutable, unknown keys refused.

    The word ``none`` stands for "not set", because neither TOML nor an environment variable nor
    a command line can say it otherwise; but where it is one of a key's own words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        own = {key for key, at in cls.model_fields.items() if "none" in get_args(at.annotation)}
        return {
            key: None
            if key not in own and isinstance(value, str) and value.lower() == "none"
            else value
            for key, value in values.items()
        }


class TrainConfig(Section):
    """How long, on what, and how it reports."""

    epochs: int = Field(
        default=5, ge=1, description="passes over the training set, unless train.steps is set"
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
    allow_control: bool = Field(
        default=False,
        description="let a monitor change knobs while it trains; gpuwatch run --allow-control too",
    )
    manifest: bool = Field(
        default=True, description="write what the run consisted of into the state folder"
    )

    @model_validator(mode="after")
    def _threads_positive(self) -> "TrainConfig":
        if self.threads != "auto" and self.threads < 1:
            raise ValueError("train.threads must be auto or at least 1")
        return self


class ModelConfig(Section):
    """Which model is trained. What it reads decides which of `data` and `text` counts."""

    name: Literal["cnn", "mlp", "resnet", "gpt", "bert"] = Field(
        default="cnn",
        description="cnn, mlp, resnet read images; gpt learns to continue text, bert to sort it",
    )
    width: int = Field(
        default=32,
        ge=4,
        le=65_536,
        description="channels of cnn's and resnet's first stage; size of mlp's, gpt's, bert's "
        "hidden states",
    )
    depth: int = Field(
        default=2, ge=1, le=512, description="hidden layers of mlp, blocks of gpt and bert"
    )
    heads: int = Field(default=4, ge=1, le=1024, description="attention heads of gpt and bert")
    stages: tuple[int, ...] = Field(
        default=(3, 4, 6, 3), description="bottleneck blocks in each stage of resnet"
    )

    @field_validator("stages", mode="before")
    @classmethod
    def _numbers_between_commas(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.strip("[]() ").split(",") if part.strip())

    @model_validator(mode="after")
    def _divisible(self) -> "ModelConfig":
        if self.name in ("gpt", "bert") and self.width % self.heads:
            raise ValueError(
                f"model.width={self.width} is no multiple of model.heads={self.heads}: each head "
                "has an equal share of it"
            )
        if self.name == "resnet" and (len(self.stages) != 4 or min(self.stages) < 1):
            raise ValueError("model.stages must be four numbers, each at least 1")
        return self

    @property
    def reads(self) -> Literal["images", "text"]:
        """What the model is fed with."""
        return "text" if self.name in ("gpt", "bert") else "images"


class DataConfig(Section):
    """Which images are read, how they are cut, changed and drawn."""

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
    colour_strength: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="brightness, contrast and saturation change by up to that share, in the worker",
    )
    mixup_alpha: float = Field(
        default=0.0,
        ge=0,
        description="MixUp on the device with a share from Beta(alpha, alpha); 0: none",
    )
    cutmix_alpha: float = Field(
        default=0.0,
        ge=0,
        description="CutMix on the device with an area from Beta(alpha, alpha); 0: none; with "
        "both set each batch draws one",
    )
    strength_schedule: Literal["constant", "linear", "late_off"] = Field(
        default="constant",
        description="of colour, MixUp and CutMix: linear falls to 0 at the end, late_off is 0 in "
        "the last data.strength_late_share",
    )
    strength_late_share: float = Field(
        default=0.2, ge=0, le=1, description="last share of the steps that late_off leaves alone"
    )
    balance: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="how far rare classes are drawn more often: 0 as they come, 1 all equally",
    )
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


class TextConfig(Section):
    """Which text is read, and how it becomes batches of tokens."""

    path: Path | None = Field(
        default=None,
        description="a json, jsonl, csv, txt or parquet file, or a folder of them; none: the "
        "English prose that comes with Python",
    )
    format: Literal["auto", "json", "csv", "text", "parquet"] = Field(
        default="auto", description="of the files; auto: by their names"
    )
    column: str = Field(default="text", description="where the text is, in json, csv and parquet")
    label_column: str = Field(default="label", description="where the class is; bert needs it")
    tokenizer: Literal["bytes", "wordpiece"] = Field(
        default="bytes",
        description="bytes: needs nothing; wordpiece: trained on this very text, kept in the cache",
    )
    vocabulary: int = Field(
        default=4000, ge=300, le=1_000_000, description="pieces of the wordpiece tokenizer"
    )
    max_tokens: int = Field(
        default=256, ge=8, le=131_072, description="longer texts are cut into several"
    )
    padding: Literal["fixed", "dynamic", "bucket", "pack"] = Field(
        default="bucket",
        description="fixed: to max_tokens; dynamic: to the longest of the batch; bucket: batches "
        "of alike lengths; pack: several texts in a row that cannot see each other",
    )
    bucket_batches: int = Field(
        default=50, ge=1, description="batches that are sorted by length together, for bucket"
    )
    multiple: int | Literal["auto"] = Field(
        default="auto",
        description="padded lengths are multiples of it; auto: 8 on CUDA, for its matrix units, "
        "else 1",
    )
    clean: bool = Field(
        default=True,
        description="drop tags, entities, mojibake, empty and repeated texts before all else",
    )
    num_proc: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="processes that tokenize; one is faster for small sets",
    )
    eval_fraction: float = Field(default=0.1, ge=0, lt=1, description="share of texts held out")

    @model_validator(mode="after")
    def _multiple_positive(self) -> "TextConfig":
        if self.multiple != "auto" and not 1 <= self.multiple <= 1024:
            raise ValueError("text.multiple must be auto or from 1 to 1024")
        return self


class LoaderConfig(Section):
    """How batches are fetched. ``auto`` values adapt to each other and to the machine."""

    batch_size: int = Field(default=32, ge=1, description="samples of one micro-batch on one rank")
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


class PrecisionConfig(Section):
    """In which number formats is computed."""

    mode: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp16-manual"] = Field(
        default="auto",
        description="auto: bf16 on GPUs that have it, fp16 on older ones, fp32 on CPU; fp16-manual "
        "keeps fp32 master weights beside an fp16 model, to learn from",
    )
    loss_scale: float | Literal["dynamic"] = Field(
        default="dynamic", description="of fp16 and fp16-manual; dynamic halves on overflow"
    )
    initial_scale: float = Field(
        default=65536.0, ge=1, le=2.0**32, description="where the dynamic scale begins"
    )
    growth_interval_steps: int = Field(
        default=2000, ge=1, description="steps without overflow after which it doubles"
    )

    @model_validator(mode="after")
    def _scale_positive(self) -> "PrecisionConfig":
        if self.loss_scale != "dynamic" and not 1 <= self.loss_scale <= 2.0**32:
            raise ValueError("precision.loss_scale must be dynamic or from 1 to 2^32")
        return self


class OptimConfig(Section):
    """Optimizer, learning rate and its course."""

    name: Literal["sgd", "adamw"] = Field(default="sgd", description="sgd has Nesterov momentum")
    lr: float | Literal["auto"] = Field(
        default="auto", description="peak learning rate; auto: 0.05 for sgd, 0.001 for adamw"
    )
    base_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="samples of a step, over all ranks, that optim.lr was found for; none: lr is "
        "not scaled",
    )
    lr_scaling: Literal["auto", "linear", "sqrt", "none"] = Field(
        default="auto",
        description="how lr follows the samples of a step; auto: linear for sgd, sqrt for adamw",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(
        default=5e-4, ge=0, description="on weights, not on norms and biases"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="longest gradient over all weights; none: not clipped"
    )
    schedule: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = Field(
        default="cosine", description="after the warm-up"
    )
    warmup_steps: int | Literal["auto"] = Field(
        default="auto", description="optimizer steps up to the peak; auto: optim.warmup_share"
    )
    warmup_share: float = Field(
        default=0.05, ge=0, le=1, description="share of the optimizer steps up to the peak"
    )
    decay_share: float = Field(
        default=0.2, gt=0, le=1, description="last share of the steps, in which wsd falls"
    )
    lr_min_ratio: float = Field(
        default=0.0, ge=0, le=1, description="where cosine, linear and wsd end, share of lr"
    )

    @model_validator(mode="after")
    def _positive(self) -> "OptimConfig":
        if self.lr != "auto" and self.lr <= 0:
            raise ValueError("optim.lr must be auto or above 0")
        if self.warmup_steps != "auto" and self.warmup_steps < 0:
            raise ValueError("optim.warmup_steps must be auto or at least 0")
        return self

    @property
    def base_lr(self) -> float:
        """The learning rate after the warm-up, ``auto`` settled, before it follows the batch."""
        if self.lr != "auto":
            return self.lr
        return 0.05 if self.name == "sgd" else 1e-3


class MemoryConfig(Section):
    """What is done for memory, and what is looked at."""

    checkpoint_activations: bool = Field(
        default=False,
        description="compute activations again in the backward instead of keeping them",
    )
    leak_checks: bool = Field(
        default=True,
        description="look for kept graphs, growing tensors, forgotten zero_grad; told to gpuwatch",
    )
    leak_interval_steps: int = Field(
        default=50, ge=1, description="optimizer steps between two looks"
    )
    summary: bool = Field(
        default=False, description="print what memory was used for, at the end and when it runs out"
    )
    snapshot: Path | None = Field(
        default=None,
        description="file for the CUDA allocator's snapshot of the first rank, written at the end "
        "and when its memory runs out",
    )


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
    comm_hook: Compression | None = Field(
        default=None,
        description="in which 16 bits gradients travel: bf16 keeps their range, fp16 more digits; "
        "none: as they are",
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

    preset: Literal["cnn", "mlp", "resnet50", "gpt-mini", "bert-tiny", "bert"] = Field(
        default="cnn", description="a set of values under all other sources"
    )
    train: TrainConfig = TrainConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    text: TextConfig = TextConfig()
    loader: LoaderConfig = LoaderConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    memory: MemoryConfig = MemoryConfig()
    dist: DistConfig = DistConfig()
    faults: FaultsConfig = FaultsConfig()

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.model.name == "bert" and self.text.tokenizer != "wordpiece":
            raise ValueError("model.name=bert reads words: it needs text.tokenizer=wordpiece")
        return self


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # A small CNN that learns the made set in a minute on two cores.
    "cnn": {
        "model": {"name": "cnn", "width": 32},
        "data": {"image_px": 64},
        "loader": {"batch_size": 32},
        "optim": {"name": "sgd", "weight_decay": 5e-4, "warmup_steps": 10},
    },
    # As little compute as there can be: what is left is the loader and the loop.
    "mlp": {
        "model": {"name": "mlp", "width": 64, "depth": 2},
        "data": {"image_px": 16},
        "loader": {"batch_size": 64},
        "optim": {"name": "sgd", "weight_decay": 5e-4},
    },
    # He et al. 2015, with the recipe of Goyal et al. 2017: lr 0.1 for 256 images a step, linear.
    "resnet50": {
        "model": {"name": "resnet", "width": 64, "stages": (3, 4, 6, 3)},
        "data": {"image_px": 224, "crop_scale_min": 0.08},
        "loader": {"batch_size": 64},
        "optim": {
            "name": "sgd",
            "lr": 0.1,
            "base_batch_size": 256,
            "weight_decay": 1e-4,
            "schedule": "cosine",
        },
    },
    # A GPT of 4 blocks over bytes: needs nothing beside torch.
    "gpt-mini": {
        "model": {"name": "gpt", "width": 128, "depth": 4, "heads": 4},
        "text": {"tokenizer": "bytes", "padding": "pack", "max_tokens": 256},
        "loader": {"batch_size": 8},
        "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0},
    },
    # Two layers of 128 (Turc et al. 2019), for tests and laptops.
    "bert-tiny": {
        "model": {"name": "bert", "width": 128, "depth": 2, "heads": 2},
        "text": {"tokenizer": "wordpiece", "padding": "bucket", "max_tokens": 128},
        "loader": {"batch_size": 16},
        "optim": {"name": "adamw", "lr": 5e-4, "weight_decay": 0.01, "clip_norm": 1.0},
    },
    # BERT-base (Devlin et al. 2018), from random weights.
    "bert": {
        "model": {"name": "bert", "width": 768, "depth": 12, "heads": 12},
        "text": {"tokenizer": "wordpiece", "padding": "bucket", "max_tokens": 512},
        "loader": {"batch_size": 16},
        "optim": {
            "name": "adamw",
            "lr": 1e-4,
            "weight_decay": 0.01,
            "schedule": "linear",
            "clip_norm": 1.0,
        },
    },
}
