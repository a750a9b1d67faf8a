"""One process seen through /proc: its line, its files, its executable, its people."""
