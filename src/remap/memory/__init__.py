"""What is so: pages, homes, rings and pools of all tenants, and every change of them."""
