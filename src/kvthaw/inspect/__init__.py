"""What decode steps recalled: a recorder, and a page that shows it."""
