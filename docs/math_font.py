"""Makes src/keel/view/math.woff2: STIX Two Math with the characters of our formulas.

pip install fonttools brotli ziamath      # ziamath ships the font
python docs/math_font.py SITE-PACKAGES/ziamath/fonts/STIXTwoMath-Regular.ttf
"""

from __future__ import annotations

import sys
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont

TARGET = Path(__file__).parents[1] / "src/keel/view/math.woff2"
CHARACTERS = (
    "20-7E,A0,AF,B1,B7,D7,2C6,2D9,2DC,391-3A9,3B1-3C9,3D1,3D5,3F1,3F5,2013,2014,2016,2019,"
    "2026,2032,2061-2063,210E,2113,211D,2190-2194,21A6,21D0-21D4,2200,2202,2203,2205,2207,"
    "2208,2209,220B,220F,2211,2212,221A,221D,221E,2223,2225-222B,223C,2248,2260,2261,2264,"
    "2265,226A,226B,2282,2286,2295,2297,22C5,22EF,2308-230B,27E8,27E9,"
    "1D434-1D467,1D53C,1D6E2-1D71B"
)


def main() -> None:
    font = TTFont(sys.argv[1])
    options = subset.Options()
    options.layout_features, options.hinting, options.name_IDs = ["ssty"], False, ["*"]
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=subset.parse_unicodes(CHARACTERS))
    subsetter.subset(font)
    constants = font["MATH"].table.MathConstants
    # As TeX for single letters: subscripts at one height, whether or not a letter has a descender.
    constants.SubscriptBaselineDropMin.Value = -1000
    constants.SuperscriptBaselineDropMax.Value = 1000
    constants.LowerLimitBaselineDropMin.Value = 500
    constants.LowerLimitGapMin.Value = 100
    for record in font["name"].names:
        if record.nameID in (1, 3, 4, 6, 16):
            record.string = "KeelMath" if record.nameID == 6 else "Keel Math"
    font.flavor = "woff2"
    font.save(TARGET)


if __name__ == "__main__":
    main()
