"""What is measured: one subject a file. registry.py explains how."""
