"""Models of Llama-3-8B's shape in vLLM: `grid` serves them, `predicted` compares with a profile.

models.py and planned.py make the models, engine.py times one, ideal.py says what could be saved.
"""
