"""Four papers' numbers beside ours, on one page (docs/notes/paper-vs-ours.md), from what other commands have stored.

numbers.py   the numbers of the tables and of the sentences, by paper
words.py     the sentences
page.py      the page of both
"""
