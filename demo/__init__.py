"""Runnable scenarios for gpuwatch: real training with a known cause of slowness."""
