"""From a target (file, archive, image, process) to its modules, and what is said of them."""
