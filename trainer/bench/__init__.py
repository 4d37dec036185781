"""What the trainer does on this machine, measured beside what is claimed elsewhere.

`loader`: an untuned pipeline against a tuned one. `precision`: the number formats. `table`: batch
size, mixed precision and recomputed activations. The click group is `trainer.bench.commands.bench`.
"""
