"""The ask/tell loop; the only package that imports optuna."""
