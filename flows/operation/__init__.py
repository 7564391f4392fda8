"""What surrounds a run: Prefect servers, deployments, credentials, and what killed drivers left."""
