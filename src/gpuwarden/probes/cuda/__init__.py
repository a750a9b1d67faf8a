"""Calls of the CUDA driver library as they happen: uprobes, their records, what they copy."""
