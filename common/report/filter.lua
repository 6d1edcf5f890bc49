-- What pandoc makes of a notebook's Markdown, for the page (html5) and for the PDF (typst).
--
-- Every heading gets the notebook's name before its id, figures get the size and the words that
-- came with them, tables what the page needs to scroll and the PDF to find widths for its columns.

local typst = FORMAT == "typst"
local stem, title, tables = "", "", 0

-- A word this long may break after _ / . and the like; shorter ones never break in a table.
local LONG = 18
local MAY_BREAK = { ["_"] = true, ["/"] = true, ["."] = true, ["-"] = true, ["–"] = true }

-- Tables of more columns than this are not set beside the text.
local WIDE = 5

local function string_of(text)
  return '"' .. text:gsub("\\", "\\\\"):gsub('"', '\\"') .. '"'
end

local function quoted(text)
  return '"' .. text:gsub("&", "&amp;"):gsub('"', "&quot;"):gsub("<", "&lt;") .. '"'
end

local function set_names(meta)
  stem = pandoc.utils.stringify(meta.stem)
end

local function header(block)
  if title == "" then
    title = pandoc.utils.stringify(block)
  end
  block.identifier = stem .. "-" .. block.identifier
  return block
end

local function link(inline)
  if inline.target:sub(1, 1) == "#" then
    inline.target = "#" .. stem .. "-" .. inline.target:sub(2)
  end
  return inline
end

local function image(inline)
  local alt = inline.attributes.alt or pandoc.utils.stringify(inline.caption)
  local pixels = tonumber(inline.attributes.pixels)
  if typst then
    local width = pixels and (pixels / 100 .. "in") or "100%"
    local call = "#picture(%s, %s, alt: %s)"
    return pandoc.RawInline("typst", call:format(string_of(inline.src), width, string_of(alt)))
  end
  local size = pixels and (' width="%d"'):format(pixels) or ""
  local tag = '<img src="%s"%s alt=%s>'
  return pandoc.RawInline("html", tag:format(inline.src, size, quoted(alt)))
end

local function code_block(block)
  block.classes = {} -- colours would be all that a language brings
  return block
end

-- Typst ------------------------------------------------------------------------------------------

-- Returns a word's parts that may not be torn apart.
local function pieces(word)
  if utf8.len(word) <= LONG or not word:find("%a") then
    return { word }
  end
  local found, part = {}, ""
  for _, code in utf8.codes(word) do
    local letter = utf8.char(code)
    part = part .. letter
    if MAY_BREAK[letter] then
      table.insert(found, part)
      part = ""
    end
  end
  if part ~= "" then
    table.insert(found, part)
  end
  return found
end

local function short_words_stay_whole(inline)
  local found = pieces(inline.text)
  if #found > 1 then
    return pandoc.Str(table.concat(found, "\u{200B}"))
  elseif (inline.text:find("[%-/]") or inline.text:find("–")) then
    return pandoc.RawInline("typst", "#box[#" .. string_of(inline.text) .. "]")
  end
end

local function cell_of(cell)
  local words = {}
  for word in pandoc.utils.stringify(cell.contents):gmatch("[^ \n]+") do
    for _, piece in ipairs(pieces(word)) do
      table.insert(words, string_of(piece))
    end
  end
  local blocks = cell.contents:walk({ Str = short_words_stay_whole })
  local text = pandoc.write(pandoc.Pandoc(blocks), "typst", { wrap_text = "none" })
  local listed = #words > 0 and "(" .. table.concat(words, ", ") .. ",)" or "()"
  return "(words: " .. listed .. ", text: [" .. text:gsub("%s+$", "") .. "])"
end

local function row_of(row)
  local cells = {}
  for _, cell in ipairs(row.cells) do
    table.insert(cells, cell_of(cell))
  end
  return "(" .. table.concat(cells, ",\n    ") .. ",)"
end

local function rows_of(rows)
  local found = {}
  for _, row in ipairs(rows) do
    table.insert(found, row_of(row))
  end
  return #found > 0 and "(" .. table.concat(found, ",\n  ") .. ",)" or "()"
end

local ALIGNMENTS = { AlignLeft = "left", AlignRight = "right", AlignCenter = "center" }

local function typst_table(block)
  local alignments = {}
  for _, column in ipairs(block.colspecs) do
    table.insert(alignments, ALIGNMENTS[column[1]] or "left")
  end
  local call = "#data-table((%s,),\n  head: %s,\n  body: %s)"
  local columns = table.concat(alignments, ", ")
  local body = rows_of(block.bodies[1].body)
  return pandoc.RawBlock("typst", call:format(columns, rows_of(block.head.rows), body))
end

-- The page ---------------------------------------------------------------------------------------

-- Returns whether a table's rows begin with names in words. A formula alone is none: screen readers
-- and checkers differ on whether it can be read out as a header.
local function rows_have_names(block)
  local named = block.colspecs[1][1] == "AlignLeft"
  for _, body in ipairs(block.bodies) do
    for _, row in ipairs(body.body) do
      local words = 0
      row.cells[1].contents:walk({
        Str = function() words = words + 1 end,
        Code = function() words = words + 1 end,
      })
      named = named and words > 0
    end
  end
  return named
end

local function page_table(block)
  tables = tables + 1
  local names = {}
  for _, row in ipairs(block.head.rows) do
    for _, cell in ipairs(row.cells) do
      cell.attributes.scope = "col"
      local name = pandoc.utils.stringify(cell.contents)
      table.insert(names, name)
      if name == "" then -- a header without words is one that nobody can read out
        local unseen = pandoc.RawInline("html", '<span class="unseen">name</span>')
        cell.contents = { pandoc.Plain({ unseen }) }
      end
    end
  end
  for place, column in ipairs(block.colspecs) do
    block.colspecs[place] = { column[1], nil }
  end
  if rows_have_names(block) then
    for _, body in ipairs(block.bodies) do
      body.row_head_columns = 1
      for _, row in ipairs(body.body) do
        row.cells[1].attributes.scope = "row"
      end
    end
  end
  local label = ("Table %d of %s"):format(tables, title)
  if #names > 0 then
    label = label .. ": " .. table.concat(names, ", ")
  end
  local attributes = { role = "region", tabindex = "0", ["aria-label"] = label }
  local region = pandoc.Div(block, pandoc.Attr("", { "scroll" }, attributes))
  local classes = #block.colspecs > WIDE and { "data", "wide" } or { "data" }
  return pandoc.Div(region, pandoc.Attr("", classes))
end

local function table_of(block)
  local head = block.head.rows[1]
  if head and #head.cells == 2 and #head.cells[1].contents == 0 then
    block.head.rows = {} -- a name and its value need no header
  end
  return typst and typst_table(block) or page_table(block)
end

return {
  { Meta = set_names },
  { Header = header },
  { Link = link, Image = image, Table = table_of, CodeBlock = code_block },
}
