"""The demo's runs (real.py) against their simulation from their own measurements (calibrated.py), side by side (compare.py)."""
