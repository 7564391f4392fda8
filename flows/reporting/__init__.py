"""What a run shows: at the terminal, and on its page in Prefect."""
