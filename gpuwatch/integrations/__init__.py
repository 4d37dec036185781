"""One line for the frameworks that run the loop themselves: Transformers, Lightning, Accelerate.

Each module here imports its framework; this package imports nothing. `gpuwatch.watch()` alone
sees every step of theirs too. What these add is what only the framework knows: loss, epoch, how
many steps there will be, and where its own evaluation and saving begin and end.
"""

__all__: list[str] = []
