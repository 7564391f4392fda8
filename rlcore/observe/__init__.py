"""Looking at runs: their history and figures, and SQL over all of them."""
