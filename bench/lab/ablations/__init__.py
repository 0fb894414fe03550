"""The same bursts served in different ways: questions.py lists them, serving.py serves, report.py says what was found."""
