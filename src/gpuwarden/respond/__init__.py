"""What may be done about a finding, in which order, and doing one step of it."""
