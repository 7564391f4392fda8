"""A stand-in for the package of the router: its command, and what of its HTTP interface is used."""
