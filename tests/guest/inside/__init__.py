"""The checks that run in the guest; nothing here is imported outside it."""
