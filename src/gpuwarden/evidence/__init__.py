"""What is kept of a process before anything is done about it: one archive that shows any change."""
