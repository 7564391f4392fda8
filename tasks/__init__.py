"""One thin file a stage: what it reads, what it asks the actors for, what it commits."""
