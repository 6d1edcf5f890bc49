"""How to train a model on what there is: plans, their memory and time, and the answer."""
