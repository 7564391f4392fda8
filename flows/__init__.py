"""What Prefect runs, and the `sluice` command."""
