"""The few prompts that come with the package: for `paceline demo` and a check without files.

They ask for text that is already in the prompt, which is where drafters that copy show best.
"""

from __future__ import annotations

DEMO = "Write a Python function that returns the n-th Fibonacci number, and explain how it works."

DEMO_COPY = """Repeat the following text exactly:

Dear Ms. Miller,

Thank you for your order of 12 March. We have received your payment, and your parcel will leave our \
warehouse on 15 March. It contains three blue cups, two white plates and one large bowl. The parcel \
will arrive on 18 March between nine and twelve in the morning. If you are not at home, our driver \
will leave it with your neighbour. If a part of your order is broken, please write to us within \
fourteen days, and we will send you a new one.

Kind regards,
The Blue Kitchen"""

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
    DEMO_COPY,
    _RENAME,
    "Write the numbers from one to thirty as words, separated by commas.",
    "Explain in a few sentences why the sky is blue.",
)
