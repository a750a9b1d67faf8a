"""The CUDA layer, live: driver libraries found and probed, contexts, module loads, launches."""
