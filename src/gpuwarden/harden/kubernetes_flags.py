"""The command line of `gpuwarden harden kubernetes`."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the site takes beside the host and the policy."""
