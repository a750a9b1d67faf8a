"""What makes the next hijack harder: policies, scripts and settings, printed and never applied."""
