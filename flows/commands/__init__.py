"""What each command of `sluice` does, one module each."""
