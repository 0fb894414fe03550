"""Who can give memory to a tenant that runs out: in which order (`policy`), and how much of each (`supply`). Pure."""
