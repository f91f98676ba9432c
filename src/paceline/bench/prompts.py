"""The few prompts that come with the package: for `paceline demo` and a check without files.

They ask for text that is already in the prompt, which is where drafters that copy show best.
"""

from __future__ import annotations

DEMO = (
    "Here is a recipe. Write it down again, word for word, and change nothing.\n\n"
    "Tomato soup: Chop two onions and four cloves of garlic. Warm three spoons of olive oil in a "
    "large pot, add the onions and the garlic, and stir for five minutes. Add one kilogram of ripe "
    "tomatoes, one litre of vegetable stock, one spoon of sugar and a pinch of salt. Let the soup "
    "simmer for thirty minutes. Blend the soup until it is smooth, add fresh basil, and serve it "
    "with toasted bread."
)

_RENAME = (
    "Rename the function `area` to `surface` in this code and print all of it:\n\n"
    "def area(width, height):\n"
    '    """Return the area of a rectangle."""\n'
    "    if width < 0 or height < 0:\n"
    '        raise ValueError("width and height must not be negative")\n'
    "    return width * height\n\n"
    "def total(rectangles):\n"
    "    return sum(area(width, height) for width, height in rectangles)\n"
)

BUILT_IN: tuple[str, ...] = (
    DEMO,
    _RENAME,
    "Write the numbers from one to thirty as words, separated by commas.",
    "Explain in a few sentences why the sky is blue.",
)
