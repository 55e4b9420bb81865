#pragma once
struct CGSize {
  double width;
  double height;
};
