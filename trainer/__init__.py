"""trainer: the instrumented PyTorch trainer that ships beside gpuwatch.

Importing this package loads nothing but itself; torch is imported when training starts.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
