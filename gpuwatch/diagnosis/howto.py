"""Where a hint's knob is: the line to change in a plain loop, in the frameworks, in the trainer."""

from collections.abc import Mapping

from gpuwatch.diagnosis.types import Hint

__all__ = ["PLACES", "lines_of"]

PLACES = ("plain", "transformers", "lightning", "trainer")
"""A loop of one's own, Transformers' TrainingArguments, Lightning's Trainer, `trainer train`."""

# `{new}` is the hint's value. A place that has no such setting is left out.
_LINES: Mapping[str, Mapping[str, str]] = {
    "num_workers": {
        "plain": "DataLoader(..., num_workers={new})",
        "transformers": "TrainingArguments(..., dataloader_num_workers={new})",
        "lightning": "DataLoader(..., num_workers={new})",
        "trainer": "--loader.num_workers {new}",
    },
    "persistent_workers": {
        "plain": "DataLoader(..., persistent_workers={new})",
        "transformers": "TrainingArguments(..., dataloader_persistent_workers={new})",
        "lightning": "DataLoader(..., persistent_workers={new})",
        "trainer": "--loader.persistent_workers {new}",
    },
    "prefetch_factor": {
        "plain": "DataLoader(..., prefetch_factor={new})",
        "transformers": "TrainingArguments(..., dataloader_prefetch_factor={new})",
        "lightning": "DataLoader(..., prefetch_factor={new})",
        "trainer": "--loader.prefetch_factor {new}",
    },
    "gradient_accumulation": {
        "plain": "(loss / {new}).backward(), with model.no_sync() but for the last of {new}",
        "transformers": "TrainingArguments(..., gradient_accumulation_steps={new})",
        "lightning": "Trainer(..., accumulate_grad_batches={new})",
        "trainer": "--train.accumulate {new}",
    },
    "comm_hook": {
        "plain": "model.register_comm_hook(None, default_hooks.{new})",
        "lightning": "Trainer(..., strategy=DDPStrategy(ddp_comm_hook=default_hooks.{new}))",
        "trainer": "--dist.comm_hook {new}",
    },
    "bucket_cap_mb": {
        "plain": "DistributedDataParallel(model, bucket_cap_mb={new})",
        "transformers": "TrainingArguments(..., ddp_bucket_cap_mb={new})",
        "lightning": "Trainer(..., strategy=DDPStrategy(bucket_cap_mb={new}))",
    },
    "overlap": {
        "plain": "model = DistributedDataParallel(model)",
        "lightning": "Trainer(..., strategy='ddp')",
    },
    "checkpoint_interval_steps": {
        "plain": "if step % {new} == 0: torch.save(...)",
        "transformers": "TrainingArguments(..., save_steps={new})",
        "lightning": "ModelCheckpoint(..., every_n_train_steps={new})",
    },
    "eval_interval_steps": {
        "plain": "if step % {new} == 0: evaluate(...)",
        "transformers": "TrainingArguments(..., eval_steps={new})",
        "lightning": "Trainer(..., val_check_interval={new})",
    },
    "eval_batch_size": {
        "plain": "DataLoader(validation, batch_size=...)",
        "transformers": "TrainingArguments(..., per_device_eval_batch_size=...)",
        "lightning": "DataLoader(validation, batch_size=...)",
    },
    "log_interval_steps": {
        "plain": "if step % {new} == 0: log(...)",
        "transformers": "TrainingArguments(..., logging_steps={new})",
        "lightning": "Trainer(..., log_every_n_steps={new})",
        "trainer": "--train.log_interval_steps {new}",
    },
    "worker_threads": {
        "plain": "DataLoader(..., worker_init_fn=lambda _: torch.set_num_threads({new}))",
        "lightning": "DataLoader(..., worker_init_fn=lambda _: torch.set_num_threads({new}))",
    },
    "in_order": {
        "plain": "DataLoader(..., in_order={new})",
        "lightning": "DataLoader(..., in_order={new})",
    },
    "timeout": {
        "plain": "DataLoader(..., timeout=60)",
        "lightning": "DataLoader(..., timeout=60)",
        "trainer": "--loader.timeout_s 60",
    },
    "detach": {
        "plain": "losses.append(loss.item())",
        "lightning": "self.log('loss', loss.detach())",
    },
    "async_save": {
        "plain": "torch.distributed.checkpoint.async_save(state, checkpoint_id=...)",
    },
}


def lines_of(hint: Hint) -> dict[str, str]:
    """Return the line to change by place, empty for a change that is no setting."""
    new = hint.new
    if new is None and any("{new}" in line for line in _LINES.get(hint.knob, {}).values()):
        return {}
    return {
        place: line.format(new=str(new).lower() if place == "trainer" else new)
        for place, line in _LINES.get(hint.knob, {}).items()
    }
