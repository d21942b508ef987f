#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints unicode_tables.inc: the code points of \\p{L}, \\p{N} and \\s as sorted ranges.

    python3 make_unicode_tables.py > unicode_tables.inc

The Unicode version is that of the unicodedata2 package where it is installed, else of Python itself.
"""
try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

CODE_POINTS = 0x110000
LINE_LENGTH = 110


def is_white_space(code):
    # unicodedata lacks the property White_Space. It is the separators and these six controls; str.isspace
    # is something else (it takes U+001C to U+001F too).
    return unicodedata.category(chr(code)).startswith("Z") or 0x09 <= code <= 0x0D or code == 0x85


def ranges_of(accepts):
    ranges = []
    for code in filter(accepts, range(CODE_POINTS)):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def print_table(name, comment, accepts):
    ranges = ranges_of(accepts)
    count = sum(last - first + 1 for first, last in ranges)
    print(f"\n// {comment}: {count} code points.\nconstexpr CodePointRange {name}[] = {{")
    line = "   "
    for first, last in ranges:
        entry = f" {{0x{first:X}, 0x{last:X}}},"
        if len(line) + len(entry) > LINE_LENGTH:
            print(line)
            line = "   "
        line += entry
    print(line.rstrip(",") + "};")


print("// SPDX-License-Identifier: Apache-2.0")
print(f"// Unicode {unicodedata.unidata_version}. Made by make_unicode_tables.py: change that, not this.")
print_table("letters", r"\p{L}, the general categories Lu, Ll, Lt, Lm and Lo",
            lambda code: unicodedata.category(chr(code)).startswith("L"))
print_table("numbers", r"\p{N}, the general categories Nd, Nl and No",
            lambda code: unicodedata.category(chr(code)).startswith("N"))
print_table("spaces", r"\s, the property White_Space", is_white_space)
