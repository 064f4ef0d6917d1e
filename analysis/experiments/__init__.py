"""Experiments turn (model, context, policy, budget) into rows of the declared tables. These modules run models."""
