"""Tasks, and what measures methods on them. Importing this package loads neither torch nor transformers."""
