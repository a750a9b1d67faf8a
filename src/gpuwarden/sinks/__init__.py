"""Where findings go: one file a kind of sink, and the dispatcher that serves them."""
