"""Work to serve, without serving it: arrivals and lengths for any number of tenants (`workload`). Pure."""
