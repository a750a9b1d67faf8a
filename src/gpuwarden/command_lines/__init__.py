"""Command lines as text: taken apart, and what they would start; nothing is ever run."""
