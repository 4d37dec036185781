"""Settings found by measuring. `loader`: workers and prefetch. The click group is
`trainer.tune.commands.tune`.
"""
