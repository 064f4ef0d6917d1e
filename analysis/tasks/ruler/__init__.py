"""RULER's thirteen tasks (arXiv 2404.06654), in our wording: same structure, difficulty and scoring."""
